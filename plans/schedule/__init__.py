"""Schedules: from a plan's decision to the operations of a step, by one of the orders."""
