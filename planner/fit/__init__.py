"""From fractions to a decision whose schedule keeps every budget, exactly."""
