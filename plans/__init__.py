"""What the other parts speak: profiles, plans, schedules, buffer assignment, traces and plots."""
