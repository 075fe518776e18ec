"""How many requests does the router place, and how many workers can there be?"""
