use crate::{Runner, RunnerError, StepError, StepInputs, StepOutputs, StepSpec};
use firesteel_tensor::{DType, Tensor, TensorView};
use serde::{Deserialize, Serialize};

/// Numbers as integers of at most 16 bits: x = (q − zero point) · scale.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Encoding {
    /// Integer type of q.
    pub dtype: DType,
    /// Distance of neighbouring numbers.
    pub scale: f32,
    /// The integer that means 0.
    pub zero_point: i32,
}

/// The encoding of an input or output of a graph that takes or gives integers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PortEncoding {
    /// Name in the graph.
    pub name: String,
    /// Its numbers.
    #[serde(flatten)]
    pub encoding: Encoding,
}

impl Encoding {
    /// Checks an encoding that was read from a file.
    ///
    /// # Errors
    /// What is wrong, and what is accepted.
    pub fn validate(&self) -> Result<(), StepError> {
        let option = |what, value: String, accepted: &str| {
            Err(StepError::Option { what, value, accepted: accepted.into() })
        };
        let Some((least, most)) = self.dtype.integer_range() else {
            return option("dtype", self.dtype.to_string(), "an integer of at most 16 bits is");
        };
        if !self.scale.is_normal() || self.scale < 0.0 {
            return option("scale", self.scale.to_string(), "a positive number is accepted");
        }
        if !(least..=most).contains(&self.zero_point) {
            let accepted = format!("{least} to {most} is accepted for {}", self.dtype);
            return option("zero_point", self.zero_point.to_string(), &accepted);
        }
        Ok(())
    }

    /// The nearest integers of floats, saturated; halves go to the even one, as
    /// `QuantizeLinear` has it.
    ///
    /// # Errors
    /// When `values` are no floats.
    pub fn quantize(&self, values: TensorView<'_>) -> Result<Tensor, StepError> {
        let (least, most) = self.dtype.integer_range().unwrap_or_default();
        let floats = values.to_f32()?;
        let integers: Vec<i32> = floats
            .iter()
            .map(|x| {
                let steps = (x / self.scale).round_ties_even() + self.zero_point as f32;
                (steps as i32).clamp(least, most)
            })
            .collect();
        Ok(Tensor::from_i32_as(self.dtype, values.shape().to_vec(), &integers)?)
    }

    /// The numbers that integers mean. Quantizing them gives the same integers.
    ///
    /// # Errors
    /// When `values` are of another type than the encoding's.
    pub fn dequantize(&self, values: TensorView<'_>) -> Result<Tensor, StepError> {
        let integers = values.to_i32()?;
        let floats = integers.iter().map(|q| (q - self.zero_point) as f32 * self.scale);
        Ok(Tensor::from_f32(values.shape().to_vec(), floats.collect())?)
    }
}

impl StepSpec {
    /// The tensors as a graph with integer ports has them. The result names the ports of a runner
    /// inside an [`EncodedRunner`]; it is no contract for a host.
    #[must_use]
    pub fn with_encodings(mut self, ports: &[PortEncoding]) -> Self {
        for tensor in self.inputs.iter_mut().chain(&mut self.outputs) {
            if let Some(port) = ports.iter().find(|port| port.name == tensor.name) {
                tensor.dtype = port.encoding.dtype;
            }
        }
        self
    }
}

/// A runner of a graph with integer ports, seen from a host that keeps floats.
///
/// The integers of a cache entry come back unchanged from the floats that they mean, so this gives
/// the bits that a host gets which writes them raw.
pub struct EncodedRunner {
    inner: Box<dyn Runner>,
    spec: StepSpec,
    inputs: Vec<Option<Encoding>>,
    outputs: Vec<Option<Encoding>>,
}

impl EncodedRunner {
    /// Steps of `spec`, in floats, on `inner`, whose ports are those of
    /// [`StepSpec::with_encodings`].
    ///
    /// # Errors
    /// When a port is not in the contract, or `inner` has other ports.
    pub fn new(
        inner: Box<dyn Runner>,
        spec: StepSpec,
        ports: &[PortEncoding],
    ) -> Result<Self, RunnerError> {
        for port in ports {
            port.encoding.validate()?;
            let mut tensors = spec.inputs.iter().chain(&spec.outputs);
            if !tensors.any(|tensor| tensor.name == port.name) {
                return Err(StepError::Option {
                    what: "port",
                    value: port.name.clone(),
                    accepted: "only inputs and outputs of the step have encodings".into(),
                }
                .into());
            }
        }
        let raw = spec.clone().with_encodings(ports);
        if raw.inputs != inner.spec().inputs || raw.outputs != inner.spec().outputs {
            return Err(RunnerError::Unusable {
                runner: inner.name().into(),
                what: "a port",
                actual: "other than the encodings say".into(),
                expected: "the integers of the manifest".into(),
            });
        }
        let encoding =
            |name: &str| ports.iter().find(|port| port.name == name).map(|port| port.encoding);
        let of =
            |tensors: &[crate::TensorSpec]| tensors.iter().map(|t| encoding(&t.name)).collect();
        let (inputs, outputs) = (of(&spec.inputs), of(&spec.outputs));
        Ok(Self { inner, spec, inputs, outputs })
    }
}

impl Runner for EncodedRunner {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn settings(&self) -> Vec<(String, String)> {
        self.inner.settings()
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        let encoded: Vec<Option<Tensor>> = inputs
            .tensors()
            .iter()
            .zip(&self.inputs)
            .map(|(view, encoding)| encoding.map(|encoding| encoding.quantize(*view)).transpose())
            .collect::<Result<_, StepError>>()?;
        let views = inputs.tensors().iter().zip(&encoded);
        let views = views.map(|(view, encoded)| encoded.as_ref().map_or(*view, Tensor::view));
        let raw = StepInputs::new(self.inner.spec(), views.collect())?;
        let outputs = self.inner.step(&raw)?;
        let decoded =
            outputs.tensors().iter().zip(&self.outputs).map(|(tensor, encoding)| match encoding {
                Some(encoding) => encoding.dequantize(tensor.view()),
                None => Ok(tensor.clone()),
            });
        let decoded = decoded.collect::<Result<_, StepError>>()?;
        Ok(StepOutputs::new(&self.spec, decoded)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_survive_the_way_through_floats() {
        for (dtype, zero_point) in
            [(DType::I16, 0), (DType::U16, 31_337), (DType::I8, 0), (DType::U8, 128)]
        {
            let (least, most) = dtype.integer_range().unwrap();
            for scale in [1e-6f32, 3.3e-4, 0.1, 7.0] {
                let encoding = Encoding { dtype, scale, zero_point };
                encoding.validate().unwrap();
                let all: Vec<i32> = (least..=most).collect();
                let integers = Tensor::from_i32_as(dtype, vec![all.len()], &all).unwrap();
                let floats = encoding.dequantize(integers.view()).unwrap();
                let back = encoding.quantize(floats.view()).unwrap();
                assert_eq!(back.bytes(), integers.bytes(), "{dtype} {scale}");
            }
        }
    }

    #[test]
    fn floats_saturate_and_round_to_even() {
        let encoding = Encoding { dtype: DType::I8, scale: 0.5, zero_point: 0 };
        let x = vec![0.25, 0.75, -0.25, 1e9, f32::NEG_INFINITY, f32::NAN];
        let x = Tensor::from_f32(vec![6], x).unwrap();
        let q = encoding.quantize(x.view()).unwrap();
        assert_eq!(q.view().to_i32().unwrap(), [0, 2, 0, 127, -128, 0]);
    }

    #[test]
    fn impossible_encodings_are_refused() {
        let good = Encoding { dtype: DType::U16, scale: 1.0, zero_point: 0 };
        for bad in [
            Encoding { dtype: DType::F32, ..good },
            Encoding { scale: 0.0, ..good },
            Encoding { scale: -1.0, ..good },
            Encoding { scale: f32::NAN, ..good },
            Encoding { zero_point: -1, ..good },
        ] {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
    }
}
