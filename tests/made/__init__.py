"""What tests make instead of measuring: model directories, profiles, decisions and plans, one way for each."""
