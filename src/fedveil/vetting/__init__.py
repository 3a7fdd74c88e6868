"""What a client looks at for itself: the model that it receives, and the update that it is about to send."""
