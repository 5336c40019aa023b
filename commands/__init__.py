"""The commands, a module each: `command` declares its options, and `call` runs it.

A module imports the parts that it needs when it is called, so that planning starts without torch.
"""
