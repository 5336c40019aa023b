"""What all commands are made of, on top of click: words, types of values, shared options, help, suggestions."""
