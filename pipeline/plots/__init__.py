"""Plotting of all figures: one style, matplotlib files, and the charts of the HTML pages."""
