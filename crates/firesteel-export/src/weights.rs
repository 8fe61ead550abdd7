use firesteel_checkpoint::Weight;
use firesteel_graph::ConstantSource;
use firesteel_tensor::DType;

/// A checkpoint's weight as constant data of another element type, converted on demand.
#[derive(Clone)]
pub struct WeightSource {
    weight: Weight,
    dtype: DType,
}

impl WeightSource {
    /// `weight` as `dtype`.
    pub fn new(weight: Weight, dtype: DType) -> Self {
        Self { weight, dtype }
    }
}

impl ConstantSource for WeightSource {
    fn write(&self, first_element: usize, out: &mut [u8]) -> Result<(), String> {
        let report = self
            .weight
            .convert(first_element, self.dtype, out)
            .map_err(|error| error.to_string())?;
        let name = self.weight.name();
        if report.non_finite > 0 {
            return Err(format!("{name} holds {} values that are not finite", report.non_finite));
        }
        if report.overflowed > 0 {
            return Err(format!(
                "{name} holds {} values beyond the range of {}; export with --precision fp32",
                report.overflowed, self.dtype
            ));
        }
        Ok(())
    }

    fn key(&self) -> Option<String> {
        Some(format!("{} as {}", self.weight.key(), self.dtype))
    }
}
