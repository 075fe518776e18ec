"""Is a cluster used as before once its workers are as fast as before?"""
