"""The same training by ssdplan and by its rivals, each in a process of its own, side by side."""
