"""Samples: the formats of documents, conversations and their chat templates, and notes for the user."""
