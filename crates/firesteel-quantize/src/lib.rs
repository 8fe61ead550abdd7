//! Integer number formats of weights and activations, chosen from calibration.

pub mod weights;
