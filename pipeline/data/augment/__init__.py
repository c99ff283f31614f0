"""What a training picture undergoes between its crop and the model."""
