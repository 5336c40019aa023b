"""How commands are made of click's parts: types of values, configurations, and what misspelt names mean."""
