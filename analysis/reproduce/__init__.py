"""What the documents claim, as data, and what the stored rows and the counts say of it."""
