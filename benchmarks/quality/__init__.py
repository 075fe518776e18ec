"""How exact are the answers, and the measurements?"""
