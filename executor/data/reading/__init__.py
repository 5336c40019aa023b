"""Files of data as documents: which files there are, in which formats, and where in them something stands."""
