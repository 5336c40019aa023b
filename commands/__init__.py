"""The commands, a module each: `add_options` says what it takes, and `call` calls the parts that it needs.

Each imports these parts when it runs, so that planning starts without torch.
"""
