"""Weight formats: how each is packed, named, sized and read."""
