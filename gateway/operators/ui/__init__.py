"""The files of the page for operators, as browsers get them; `operators/shell/page.py` serves them."""
