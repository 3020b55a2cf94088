"""Model time: profiles, links, clocks."""
