"""What all figures are plotted with: one style, matplotlib files, and the charts of the HTML pages."""
