"""What does a token cost the gateway, and what do slow clients cost it?"""
