"""The files of the page for operators, as browsers get them; `operators/page.py` serves them."""
