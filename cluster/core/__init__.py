"""What the controller decides: which processes there are to be, and what happens next. Pure."""
