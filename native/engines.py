"""Which I/O engines there are, and the environment variable that chooses one where a caller leaves it open."""

ENGINE_VARIABLE = "SSDPLAN_IO_ENGINE"
ENGINES = ("auto", "io_uring", "threads")
