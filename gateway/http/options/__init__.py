"""Fields of a JSON body that choose how a prompt is made and in which order requests are served."""
