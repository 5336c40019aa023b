"""Reading: finds the files of a data set and yields their documents and rows, each with its place."""
