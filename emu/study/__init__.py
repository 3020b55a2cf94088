"""Published figures against the model: what was fitted, what is predicted, how far off it is."""
