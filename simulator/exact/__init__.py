"""Workers that step the real engine core and make real hand-overs, in virtual time. Pure."""
