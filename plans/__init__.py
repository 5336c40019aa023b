"""The language of all parts: profiles, plans, schedules, places in memory; and their text, plots and traces."""
