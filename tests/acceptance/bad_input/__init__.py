"""What does input cost the gateway that is wrong, or made to be expensive?"""
