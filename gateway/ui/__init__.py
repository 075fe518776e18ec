"""The files of the page for operators, as browsers get them; `http/page.py` serves them."""
