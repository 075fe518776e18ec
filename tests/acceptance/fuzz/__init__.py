"""Which requests does a cluster not survive?"""
