"""A generation request as both protocols make it, checked, and what it is charged."""
