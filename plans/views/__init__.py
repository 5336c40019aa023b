"""What a person sees: text and traces; below, pictures (`plots/`) and pages (`page/`)."""
