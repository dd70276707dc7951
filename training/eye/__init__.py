"""The tiny vision model: pictures, questions about them, an eye and a decoder, and how they are trained."""
