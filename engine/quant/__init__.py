"""Weight formats: how each is packed, sized and expanded."""
