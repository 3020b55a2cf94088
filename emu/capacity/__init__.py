"""The closed form of bandwidth x capacity: how large a batch fits, and how long its step takes."""
