"""How fast is the engine alone, and how well does it use its memory?"""
