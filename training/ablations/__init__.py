"""Small readers of tables, trained alike but for their size or one thing in their lessons."""
