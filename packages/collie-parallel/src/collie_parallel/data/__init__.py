"""The data feed: datasets, padding, and a loader whose order does not depend on the layout."""
