"""What requests look like on the wire. A field not named here is an error, never ignored."""
