"""The linear program: its variables, its constraints and objectives, its solvers and its answers."""
