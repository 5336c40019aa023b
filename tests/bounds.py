"""How long a test waits for what must end: so long that only something that hangs takes longer, on any machine."""

HANG_SECONDS = 900.0
