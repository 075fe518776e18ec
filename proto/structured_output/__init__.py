"""What constrains the text of an answer."""
