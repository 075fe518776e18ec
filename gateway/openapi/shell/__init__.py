"""The endpoints of the document."""
