"""The gateway serves clients: it validates, tokenizes, hashes, submits to the router and turns ids back into text.

Text exists only here. A request passes through the modules in this order:

    service ─> generation ─> validate ─> tokenizer (chat_template) ─> router.api ─> text ─> service
"""
