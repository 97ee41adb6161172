"""What is made from the library when the site is built, so that no page can say what is no longer so."""
