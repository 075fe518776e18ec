"""How fast does a cluster answer, and what does each of its choices bring?"""
