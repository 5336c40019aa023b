"""What a person sees: text, tables, plots, traces and pages."""
