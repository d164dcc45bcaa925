"""Where a posterior meets Keras: layers, models, files of networks."""
