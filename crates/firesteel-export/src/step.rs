use crate::{Dialect, ExportError, ExportOptions, Gelu, Precision, WeightSource, lint};
use firesteel_checkpoint::{
    Activation, Checkpoint, LayerKind, LayerWeights, ModelConfig, Slot, Weight,
};
use firesteel_graph::{Constant, GeluForm, Graph, GraphError, Op, Part, Tag, ValueId};
use firesteel_step::{CacheLayout, LayerSpec, Logits, Role, StepOptions, StepSpec};
use firesteel_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The graphs of one step.
#[derive(Debug)]
pub struct StepGraphs {
    /// Contract of the step's graph. With a sharded head its first output is the hidden state.
    pub spec: StepSpec,
    /// The step.
    pub graph: Graph,
    /// The vocabulary projection as graphs of its own; empty when it is in the step or left out.
    pub heads: Vec<HeadGraph>,
    /// Names of the values that hold the residual stream after each layer.
    pub layer_hidden: Vec<String>,
    /// How half precision is kept from overflowing.
    pub wide: WideTensors,
    /// Checkpoint tensors that the graphs hold.
    pub tensors_read: usize,
}

/// One part of a sharded vocabulary projection: hidden state in, logits of some rows out.
#[derive(Debug)]
pub struct HeadGraph {
    /// The graph.
    pub graph: Graph,
    /// Vocabulary rows.
    pub rows: Range<usize>,
}

/// Which tensors of a half-precision graph are computed wider than they are stored, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WideTensors {
    /// Names of values that stay in f32 in the graph.
    pub f32_values: Vec<String>,
    /// The reason, and what is done instead where no value stays in f32.
    pub reason: String,
}

/// Builds the step of `checkpoint` with `options`. Weights are referenced, not read.
///
/// # Errors
/// When the options do not fit the model or each other.
pub fn build(checkpoint: &Checkpoint, options: &ExportOptions) -> Result<StepGraphs, ExportError> {
    let config = checkpoint.config();
    let shards = options.head_shards;
    let option = |option, value: String, problem: &str| {
        Err(ExportError::Option { option, value, problem: problem.into() })
    };
    if shards == 0 || shards > config.vocab_size {
        return option("--head-shards", shards.to_string(), "1 to the vocabulary size is accepted");
    }
    if shards > 1 && options.logits == Logits::Hidden {
        return option("--head-shards", shards.to_string(), "there is no head with --no-lm-head");
    }
    let activation = config.family.block().mlp.activation;
    if activation != Activation::Gelu && options.gelu != Gelu::default() {
        let problem = format!("layers of {} have {} instead", config.family, activation.name());
        return option("--gelu", format!("{:?}", options.gelu).to_lowercase(), &problem);
    }
    let spec = StepSpec::new(
        config,
        &StepOptions {
            tokens: options.tokens,
            context: options.context,
            layers: options.layers.clone(),
            cache_layout: options.cache_layout,
            logits: if shards > 1 { Logits::Hidden } else { options.logits },
            dtype: options.precision.dtype(),
        },
    )?;
    let mut builder = Builder::new("step", config, options);
    let layer_hidden = builder.step(checkpoint, &spec)?;
    let (graph, mut tensors_read) = (builder.graph, builder.weights.len());
    let heads = if shards > 1 { head_graphs(checkpoint, options)? } else { Vec::new() };
    if !heads.is_empty() {
        tensors_read += 2;
    }
    for graph in std::iter::once(&graph).chain(heads.iter().map(|head| &head.graph)) {
        graph.validate()?;
        let findings = lint(graph, options.dialect);
        if let Some(first) = findings.first().cloned() {
            let (count, dialect) = (findings.len(), options.dialect);
            return Err(ExportError::Lint { count, dialect, first });
        }
    }
    let wide = wide_tensors(options);
    Ok(StepGraphs { spec, graph, heads, layer_hidden, wide, tensors_read })
}

/// Vocabulary rows of part `shard` of `shards` of a head of `rows` rows. Parts differ by at most
/// one row.
pub fn head_rows(rows: usize, shard: usize, shards: usize) -> Range<usize> {
    let cut = |part: usize| (rows as u128 * part as u128 / shards.max(1) as u128) as usize;
    cut(shard)..cut(shard + 1)
}

fn wide_tensors(options: &ExportOptions) -> WideTensors {
    let reason = match (options.precision, options.dialect) {
        (Precision::Fp32, _) => "every tensor is f32",
        (Precision::Fp16, Dialect::Portable) => {
            "every tensor is f16; RMSNorm divides by the row's largest magnitude before it squares, \
             so the sum of squares cannot overflow in any reader's arithmetic"
        }
        (Precision::Fp16, Dialect::Qnn) => {
            "every tensor is f16; RMSNormalization accumulates in f32 inside the op (stash_type 1)"
        }
    };
    WideTensors { f32_values: Vec::new(), reason: reason.into() }
}

fn head_graphs(
    checkpoint: &Checkpoint,
    options: &ExportOptions,
) -> Result<Vec<HeadGraph>, ExportError> {
    let config = checkpoint.config();
    let (rows, shards) = (config.vocab_size, options.head_shards);
    let mut heads = Vec::with_capacity(shards);
    for shard in 0..shards {
        let range = head_rows(rows, shard, shards);
        let name = format!("head_{shard}");
        let mut builder = Builder::new(&name, config, options);
        builder.prefix = format!("{name}.");
        let shape = vec![1, options.tokens, config.hidden_size];
        let hidden = builder.graph.input("hidden", builder.dtype, shape)?;
        builder.part(Part::Border);
        let x = builder.reshape(hidden, "x", vec![options.tokens, config.hidden_size])?;
        let weight =
            checkpoint.head_weight().rows(range.clone()).ok_or_else(|| ExportError::Option {
                option: "--head-shards",
                value: shards.to_string(),
                problem: format!("rows {range:?} are not in the head of {rows} rows"),
            })?;
        let output = format!("logits_{shard}");
        let weight_name = shard_name(weight.name(), shard);
        let logits = builder.head(
            x,
            checkpoint.final_norm(),
            (&weight_name, &weight),
            options.logits,
            &output,
        )?;
        builder.graph.output(logits)?;
        heads.push(HeadGraph { graph: builder.graph, rows: range });
    }
    Ok(heads)
}

/// Name of the matrix of a part of the vocabulary projection, whose weight is `weight`.
fn shard_name(weight: &str, shard: usize) -> String {
    format!("{weight}.{shard}")
}

/// The weight of which the graph of part `shard` of the vocabulary projection has rows, by the name
/// of its matrix there.
pub fn weight_of_shard(matrix: &str, shard: usize) -> &str {
    matrix.strip_suffix(&shard_name("", shard)).unwrap_or(matrix)
}

/// Adds nodes to a graph; names start with `prefix`.
struct Builder<'a> {
    graph: Graph,
    config: &'a ModelConfig,
    options: &'a ExportOptions,
    dtype: DType,
    prefix: String,
    /// Number of the layer that nodes are added of.
    layer: Option<usize>,
    weights: HashMap<String, ValueId>,
    scalars: HashMap<String, ValueId>,
}

type Built = Result<ValueId, GraphError>;

impl<'a> Builder<'a> {
    fn new(name: &str, config: &'a ModelConfig, options: &'a ExportOptions) -> Self {
        Self {
            graph: Graph::new(name),
            config,
            options,
            dtype: options.precision.dtype(),
            prefix: String::new(),
            layer: None,
            weights: HashMap::new(),
            scalars: HashMap::new(),
        }
    }

    /// What the nodes that are added from now on are there for.
    fn part(&mut self, part: Part) {
        self.graph.set_tag(Some(Tag { layer: self.layer, part }));
    }

    fn add(&mut self, op: Op, inputs: &[ValueId], name: &str) -> Built {
        self.graph.add(op, inputs, format!("{}{name}", self.prefix))
    }

    fn reshape(&mut self, x: ValueId, name: &str, shape: Vec<usize>) -> Built {
        self.add(Op::Reshape { shape }, &[x], name)
    }

    fn transpose(&mut self, x: ValueId, name: &str, permutation: &[usize]) -> Built {
        self.add(Op::Transpose { permutation: permutation.to_vec() }, &[x], name)
    }

    fn split(
        &mut self,
        x: ValueId,
        node: &str,
        axis: usize,
        parts: &[(&str, usize)],
    ) -> Result<Vec<ValueId>, GraphError> {
        let sizes = parts.iter().map(|(_, size)| *size).collect();
        let names = parts.iter().map(|(name, _)| format!("{}{name}", self.prefix)).collect();
        let node = format!("{}{node}/Split", self.prefix);
        self.graph.add_node(node, Op::Split { axis, sizes }, &[x], names)
    }

    fn weight(&mut self, name: &str, weight: &Weight) -> Built {
        if let Some(id) = self.weights.get(name) {
            return Ok(*id);
        }
        let source = WeightSource::new(weight.clone(), self.dtype);
        let constant = Constant::Source(Arc::new(source));
        let id = self.graph.add_constant(name, self.dtype, weight.shape().to_vec(), constant)?;
        self.weights.insert(name.to_owned(), id);
        Ok(id)
    }

    /// A scalar constant, shared by all its uses.
    fn scalar(&mut self, name: &str, value: f64) -> Built {
        let name = format!("{}constant.{name}", self.prefix);
        if let Some(id) = self.scalars.get(&name) {
            return Ok(*id);
        }
        let tensor = Tensor::from_f32_as(self.dtype, vec![], vec![value as f32])?;
        let id = self.graph.add_constant(&name, self.dtype, vec![], Constant::Tensor(tensor))?;
        self.scalars.insert(name, id);
        Ok(id)
    }

    /// The whole step; returns the names of the values after each layer.
    fn step(
        &mut self,
        checkpoint: &Checkpoint,
        spec: &StepSpec,
    ) -> Result<Vec<String>, ExportError> {
        let mut inputs = HashMap::new();
        for tensor in &spec.inputs {
            let id = self.graph.input(&tensor.name, tensor.dtype, tensor.shape.clone())?;
            inputs.insert(tensor.role, id);
        }
        let input = |role: Role| {
            inputs.get(&role).copied().ok_or_else(|| GraphError::Value {
                name: format!("{role:?}"),
                problem: "is not an input of the step".into(),
            })
        };
        let flat = vec![spec.tokens, spec.hidden_size];
        self.part(Part::Border);
        let mut x = self.reshape(input(Role::Embedding)?, "x_rows", flat)?;
        let mut entries = Vec::new();
        let mut layer_hidden = Vec::new();
        for (i, layer) in spec.layers.iter().enumerate() {
            let number = spec.first_layer + i;
            self.prefix = format!("layers.{number}.");
            self.layer = Some(number);
            let ports = LayerPorts {
                index: i,
                layer,
                cos: input(Role::Cos(layer.kind))?,
                sin: input(Role::Sin(layer.kind))?,
                mask: input(Role::Mask(layer.kind))?,
                keys: input(Role::KeyCache(i))?,
                values: input(Role::ValueCache(i))?,
            };
            let (hidden, keys, values) =
                self.layer(spec, &checkpoint.layers()[number], x, &ports)?;
            x = hidden;
            entries.extend([keys, values]);
            layer_hidden.push(self.graph.value(x).name.clone());
        }
        self.prefix = String::new();
        self.layer = None;
        let first = if spec.logits == Logits::Hidden {
            self.part(Part::Border);
            let shape = vec![1, spec.tokens, spec.hidden_size];
            self.reshape(x, "hidden", shape)?
        } else {
            let weight = checkpoint.head_weight();
            let name = weight.name().to_owned();
            self.head(x, checkpoint.final_norm(), (&name, weight), spec.logits, "logits")?
        };
        self.graph.output(first)?;
        for id in entries {
            self.graph.output(id)?;
        }
        Ok(layer_hidden)
    }

    /// Final norm and vocabulary projection of x [T, H]: [1, N], or [1, T, N] for all tokens.
    fn head(
        &mut self,
        x: ValueId,
        norm: &Weight,
        (weight_name, weight): (&str, &Weight),
        logits: Logits,
        output: &str,
    ) -> Built {
        let (tokens, rows) = (self.options.tokens, weight.shape()[0]);
        let last = logits == Logits::Last && tokens > 1;
        self.part(Part::LastToken);
        let x = if last {
            self.add(Op::Slice { axis: 0, start: tokens - 1, end: tokens }, &[x], "head.last")?
        } else {
            x
        };
        self.part(Part::FinalNorm);
        let normed = self.rms_norm(x, norm, "head.norm")?;
        self.part(Part::Vocabulary);
        let weight = self.weight(weight_name, weight)?;
        // The contract's names carry no prefix.
        let prefix = std::mem::take(&mut self.prefix);
        let result = if logits == Logits::All {
            let rows_of_logits =
                self.add(Op::Gemm, &[normed, weight], &format!("{output}.rows"))?;
            self.reshape(rows_of_logits, output, vec![1, tokens, rows])
        } else {
            self.add(Op::Gemm, &[normed, weight], output)
        };
        self.prefix = prefix;
        result
    }

    /// x / √(mean(x²) + ε) · weight over the last axis of x, which the weight is as long as.
    fn rms_norm(&mut self, x: ValueId, weight: &Weight, name: &str) -> Built {
        let epsilon = self.config.rms_norm_eps;
        let axis = self.graph.value(x).shape.len().saturating_sub(1);
        let scale = self.weight(weight.name(), weight)?;
        let part = |suffix: &str| format!("{name}.{suffix}");
        if self.options.dialect == Dialect::Qnn {
            let op = Op::RmsNormalization { axis, epsilon: epsilon as f32 };
            return self.add(op, &[x, scale], name);
        }
        let root = if self.options.precision == Precision::Fp32 {
            let square = self.add(Op::Mul, &[x, x], &part("square"))?;
            let mean = self.add(Op::ReduceMean { axis }, &[square], &part("mean"))?;
            let epsilon = self.scalar("epsilon", epsilon)?;
            let sum = self.add(Op::Add, &[mean, epsilon], &part("sum"))?;
            self.add(Op::Sqrt, &[sum], &part("root"))?
        } else {
            // With m = max|x|: √(mean(x²) + ε) = m · √(mean((x/m)²) + (√ε/m)²). No term exceeds
            // 1 and the product is at most m, so nothing overflows for any finite x; m is kept
            // above √ε, so that small rows divide by something.
            let magnitude = self.add(Op::Abs, &[x], &part("magnitude"))?;
            let largest = self.add(Op::ReduceMax { axis }, &[magnitude], &part("largest"))?;
            let floor = self.scalar("floor", epsilon.sqrt().max(f64::from(f32::powi(2.0, -14))))?;
            let largest = self.add(Op::Max, &[largest, floor], &part("unit"))?;
            let scaled = self.add(Op::Div, &[x, largest], &part("scaled"))?;
            let square = self.add(Op::Mul, &[scaled, scaled], &part("square"))?;
            let mean = self.add(Op::ReduceMean { axis }, &[square], &part("mean"))?;
            let root_epsilon = self.scalar("root_epsilon", epsilon.sqrt())?;
            let ratio = self.add(Op::Div, &[root_epsilon, largest], &part("ratio"))?;
            let ratio = self.add(Op::Mul, &[ratio, ratio], &part("ratio_square"))?;
            let sum = self.add(Op::Add, &[mean, ratio], &part("sum"))?;
            let root = self.add(Op::Sqrt, &[sum], &part("scaled_root"))?;
            self.add(Op::Mul, &[root, largest], &part("root"))?
        };
        let normed = self.add(Op::Div, &[x, root], &part("normed"))?;
        self.add(Op::Mul, &[normed, scale], name)
    }

    fn linear(&mut self, x: ValueId, weight: &Weight, name: &str) -> Built {
        let weight = self.weight(weight.name(), weight)?;
        self.add(Op::Gemm, &[x, weight], name)
    }

    /// The HTP's own sigmoid in half precision is right to about 2^-11 of 1 and not of the result,
    /// so a gate that is nearly closed would keep few bits. Its tanh is right to 2^-11 of the
    /// result: sigmoid(x) = (1 + tanh(x/2)) / 2.
    fn sigmoid(&mut self, x: ValueId, name: &str) -> Built {
        if (self.options.precision, self.options.dialect) != (Precision::Fp16, Dialect::Qnn) {
            return self.add(Op::Sigmoid, &[x], name);
        }
        let part = |suffix: &str| format!("{name}.{suffix}");
        let half = self.scalar("half", 0.5)?;
        let halved = self.add(Op::Mul, &[x, half], &part("halved"))?;
        let tanh = self.add(Op::Tanh, &[halved], &part("tanh"))?;
        let scaled = self.add(Op::Mul, &[tanh, half], &part("scaled"))?;
        self.add(Op::Add, &[scaled, half], name)
    }

    /// The activation of the feed-forward part.
    fn activation(&mut self, x: ValueId) -> Built {
        match self.config.family.block().mlp.activation {
            Activation::Gelu => self.gelu(x, "mlp.gelu"),
            Activation::Silu => self.silu(x, "mlp.silu"),
        }
    }

    /// x·sigmoid(x), which no processor has as one operator: the compiler for the HTP takes QuickGelu
    /// and opset 24's Swish apart into Sigmoid and Mul.
    ///
    /// These two are the fewest operators and bytes, in integers as in half precision. But in half
    /// precision the HTP's sigmoid is right to 2^-11 of 1 alone, which costs a layer of the 1.7B shape
    /// 6 dB of its output, so there it is x/2·(1 + tanh(x/2)): two operators (a fifth more once the
    /// compiler has cut them up) and a hundredth of the bytes between operators more, no byte of memory.
    /// The sum x/2 + x/2·tanh(x/2) is as many
    /// operators, less right where the gate is nearly closed, and planned with many more.
    fn silu(&mut self, x: ValueId, name: &str) -> Built {
        let part = |suffix: &str| format!("{name}.{suffix}");
        if (self.options.precision, self.options.dialect) != (Precision::Fp16, Dialect::Qnn) {
            let sigmoid = self.add(Op::Sigmoid, &[x], &part("sigmoid"))?;
            return self.add(Op::Mul, &[x, sigmoid], name);
        }
        let half = self.scalar("half", 0.5)?;
        let one = self.scalar("one", 1.0)?;
        let halved = self.add(Op::Mul, &[x, half], &part("halved"))?;
        let tanh = self.add(Op::Tanh, &[halved], &part("tanh"))?;
        let weight = self.add(Op::Add, &[tanh, one], &part("weight"))?;
        self.add(Op::Mul, &[halved, weight], name)
    }

    fn gelu(&mut self, x: ValueId, name: &str) -> Built {
        let part = |suffix: &str| format!("{name}.{suffix}");
        match (self.options.gelu, self.options.dialect) {
            (Gelu::Exact, Dialect::Qnn) => self.add(Op::Gelu(GeluForm::Exact), &[x], name),
            (Gelu::Tanh, Dialect::Qnn) => self.add(Op::Gelu(GeluForm::Tanh), &[x], name),
            (Gelu::Sigmoid, _) => {
                let slope = self.scalar("gelu_slope", 1.702)?;
                let scaled = self.add(Op::Mul, &[x, slope], &part("scaled"))?;
                let sigmoid = self.add(Op::Sigmoid, &[scaled], &part("sigmoid"))?;
                self.add(Op::Mul, &[x, sigmoid], name)
            }
            (form, Dialect::Portable) => {
                let inner = if form == Gelu::Exact {
                    let scale = self.scalar("inverse_root_two", std::f64::consts::FRAC_1_SQRT_2)?;
                    let scaled = self.add(Op::Mul, &[x, scale], &part("scaled"))?;
                    self.add(Op::Erf, &[scaled], &part("erf"))?
                } else {
                    // √(2/π)·x·(1 + 0.044715·x²)
                    let root = (2.0 / std::f64::consts::PI).sqrt();
                    let linear = self.scalar("gelu_linear", root)?;
                    let cubic = self.scalar("gelu_cubic", root * 0.044715)?;
                    let square = self.add(Op::Mul, &[x, x], &part("square"))?;
                    let term = self.add(Op::Mul, &[square, cubic], &part("term"))?;
                    let sum = self.add(Op::Add, &[term, linear], &part("sum"))?;
                    let argument = self.add(Op::Mul, &[sum, x], &part("argument"))?;
                    self.add(Op::Tanh, &[argument], &part("tanh"))?
                };
                let one = self.scalar("one", 1.0)?;
                let half = self.scalar("half", 0.5)?;
                let weight = self.add(Op::Add, &[inner, one], &part("weight"))?;
                let halved = self.add(Op::Mul, &[x, half], &part("halved"))?;
                self.add(Op::Mul, &[halved, weight], name)
            }
        }
    }

    /// Rotates the leading dims of x [1, heads, T, head_dim] by halves; the rest passes.
    fn rotate(&mut self, rotated: Rotated<'_>, ports: &LayerPorts<'_>) -> Built {
        let Rotated { x, name, output, last } = rotated;
        let dims = *self.graph.value(ports.cos).shape.last().unwrap_or(&0);
        let half = dims / 2;
        let rest = self.config.head_dim - dims;
        let part = |suffix: &str| format!("{name}.{suffix}");
        let (low, high, pass) = (part("low"), part("high"), part("pass"));
        self.part(Part::Rotation);
        let (whole, passed) = if rest == 0 {
            (x, None)
        } else {
            let turning = part("turning");
            let parts = self.split(x, &part("cut"), 3, &[(&turning, dims), (&pass, rest)])?;
            (parts[0], Some(parts[1]))
        };
        let halves = self.split(whole, &part("halves"), 3, &[(&low, half), (&high, half)])?;
        let negated = self.add(Op::Neg, &[halves[1]], &part("negated"))?;
        let turned = self.add(Op::Concat { axis: 3 }, &[negated, halves[0]], &part("turned"))?;
        let along = self.add(Op::Mul, &[whole, ports.cos], &part("along"))?;
        let across = self.add(Op::Mul, &[turned, ports.sin], &part("across"))?;
        let made = match passed {
            None => {
                self.part(last);
                self.graph.add(Op::Add, &[along, across], output)
            }
            Some(passed) => {
                let rotated = self.add(Op::Add, &[along, across], &part("rotated"))?;
                self.part(last);
                self.graph.add(Op::Concat { axis: 3 }, &[rotated, passed], output)
            }
        };
        self.part(Part::Rotation);
        made
    }

    /// [T, heads·head_dim] as [1, heads, T, head_dim].
    fn heads(&mut self, x: ValueId, heads: usize, name: &str) -> Built {
        let (tokens, width) = (self.options.tokens, self.config.head_dim);
        if tokens == 1 {
            return self.reshape(x, name, vec![1, heads, 1, width]);
        }
        let by_token =
            self.reshape(x, &format!("{name}.by_token"), vec![1, tokens, heads, width])?;
        self.transpose(by_token, name, &[0, 2, 1, 3])
    }

    /// One layer on x [T, H]: the new residual stream, keys and values.
    fn layer(
        &mut self,
        spec: &StepSpec,
        weights: &LayerWeights,
        x: ValueId,
        ports: &LayerPorts<'_>,
    ) -> Result<(ValueId, ValueId, ValueId), ExportError> {
        let config = self.config;
        let (tokens, width) = (spec.tokens, config.head_dim);
        let (heads, shared) = (config.num_attention_heads, config.num_key_value_heads);
        let group = config.group_size();
        let block = config.family.block();
        self.part(Part::AttentionNorm);
        let normed = self.rms_norm(x, weights.weight(Slot::InputNorm)?, "attention.norm")?;
        let [q, k, v_rows] = self.query_key_value(normed, weights)?;
        self.part(Part::Rotation);
        let mut q = self.heads(q, heads, "attention.q")?;
        let mut k = self.heads(k, shared, "attention.k")?;
        if block.attention.qk_norm {
            self.part(Part::HeadNorm);
            q = self.rms_norm(q, weights.weight(Slot::QueryNorm)?, "attention.q_norm")?;
            k = self.rms_norm(k, weights.weight(Slot::KeyNorm)?, "attention.k_norm")?;
        }

        // New entries bear the contract's names where they are what the step returns.
        let rolled =
            ports.layer.kind == LayerKind::Sliding && ports.layer.layout == CacheLayout::Roll;
        let (key_output, value_output) =
            (format!("k_new_{}", ports.index), format!("v_new_{}", ports.index));
        let local = |name: &str| format!("{}{name}", self.prefix);
        let (key_name, value_name) = if rolled {
            (local("attention.k_entry"), "attention.v_entry".to_owned())
        } else {
            (key_output.clone(), value_output.clone())
        };
        let q_name = local("attention.q_rotated");
        self.part(Part::Rotation);
        let q = Rotated { x: q, name: "attention.q_rope", output: &q_name, last: Part::Rotation };
        let q = self.rotate(q, ports)?;
        let k = Rotated { x: k, name: "attention.k_rope", output: &key_name, last: Part::Entry };
        let k = self.rotate(k, ports)?;
        let prefix = self.prefix.clone();
        if !rolled {
            self.prefix.clear();
        }
        self.part(Part::Entry);
        let v = if tokens == 1 {
            self.reshape(v_rows, &value_name, vec![1, shared, 1, width])?
        } else {
            let by_token = format!("{prefix}attention.v_by_token");
            let shape = vec![1, tokens, shared, width];
            let by_token = self.graph.add(Op::Reshape { shape }, &[v_rows], by_token)?;
            self.transpose(by_token, &value_name, &[0, 2, 1, 3])?
        };
        self.prefix = prefix;

        self.part(Part::Cache);
        let window = WindowNames { joined: "attention.keys", output: &key_output };
        let (keys, new_keys) = self.window(spec, ports.layer, ports.keys, k, &window)?;
        let window = WindowNames { joined: "attention.values", output: &value_output };
        let (values, new_values) = self.window(spec, ports.layer, ports.values, v, &window)?;

        // Scaling the queries is the smaller product, and keeps half-precision scores in range.
        self.part(Part::Attention);
        let scale = self.scalar("query_scale", 1.0 / (width as f64).sqrt())?;
        let q = self.add(Op::Mul, &[q, scale], "attention.q_scaled")?;
        let grouped =
            self.reshape(q, "attention.q_grouped", vec![1, shared, group * tokens, width])?;
        self.part(Part::Cache);
        let transposed = self.transpose(keys, "attention.keys_transposed", &[0, 1, 3, 2])?;
        self.part(Part::Scores);
        let mut scores = self.add(Op::MatMul, &[grouped, transposed], "attention.scores")?;
        let scored = spec.scored_keys(ports.layer);
        if tokens > 1 {
            // One axis for the tokens, so that the mask's rows line up with them.
            let shape = vec![shared, group, tokens, scored];
            scores = self.reshape(scores, "attention.scores_by_token", shape)?;
        }
        self.part(Part::Attention);
        let masked = self.add(Op::Add, &[scores, ports.mask], "attention.masked")?;
        let mut attention = self.add(Op::Softmax { axis: 3 }, &[masked], "attention.weights")?;
        if tokens > 1 {
            let shape = vec![1, shared, group * tokens, scored];
            attention = self.reshape(attention, "attention.weights_grouped", shape)?;
        }
        self.part(Part::Mix);
        let mixed = self.add(Op::MatMul, &[attention, values], "attention.mixed")?;
        self.part(Part::Attention);
        // One token's heads lie in the order of the product with the last matrix already, and a
        // compiler makes one reshape of two that follow each other.
        let mut gated = mixed;
        if block.attention.head_gate || tokens > 1 {
            let shape = vec![1, heads, tokens, width];
            gated = self.reshape(mixed, "attention.by_head", shape)?;
        }
        if block.attention.head_gate {
            gated = self.head_gate(gated, normed, weights.weight(Slot::HeadGate)?)?;
        }
        self.part(Part::Attention);
        if tokens > 1 {
            gated = self.transpose(gated, "attention.gated_by_token", &[0, 2, 1, 3])?;
        }
        let rows = self.reshape(gated, "attention.out_rows", vec![tokens, heads * width])?;
        self.part(Part::AttentionOut);
        let out = self.linear(rows, weights.weight(Slot::AttentionOut)?, "attention.out")?;
        self.part(Part::AttentionResidual);
        let x = self.add(Op::Add, &[x, out], "attention.residual")?;

        self.part(Part::MlpNorm);
        let normed = self.rms_norm(x, weights.weight(Slot::PostAttentionNorm)?, "mlp.norm")?;
        self.part(Part::MlpGate);
        let gate = self.linear(normed, weights.weight(Slot::MlpGate)?, "mlp.gate")?;
        self.part(Part::Activation);
        let active = self.activation(gate)?;
        self.part(Part::MlpUp);
        let up = self.linear(normed, weights.weight(Slot::MlpUp)?, "mlp.up")?;
        self.part(Part::MlpProduct);
        let product = self.add(Op::Mul, &[active, up], "mlp.product")?;
        self.part(Part::MlpDown);
        let down = self.linear(product, weights.weight(Slot::MlpDown)?, "mlp.down")?;
        self.part(Part::MlpResidual);
        let x = self.add(Op::Add, &[x, down], "residual")?;
        Ok((x, new_keys, new_values))
    }

    /// Rows of queries, keys and values of `normed` [T, H], by one product or by three.
    fn query_key_value(
        &mut self,
        normed: ValueId,
        weights: &LayerWeights,
    ) -> Result<[ValueId; 3], ExportError> {
        let config = self.config;
        let (query, pair) = (config.query_size(), config.key_value_size());
        let names = ["attention.q_rows", "attention.k_rows", "attention.v_rows"];
        let [q, k, v] = names;
        if let Some(fused) = weights.get(Slot::QueryKeyValue) {
            self.part(Part::QueryKeyValue);
            let fused = self.linear(normed, fused, "attention.qkv")?;
            let parts = [(q, query), (k, pair), (v, pair)];
            let parts = self.split(fused, "attention.parts", 1, &parts)?;
            return Ok([parts[0], parts[1], parts[2]]);
        }
        self.part(Part::Query);
        let q = self.linear(normed, weights.weight(Slot::Query)?, q)?;
        self.part(Part::Key);
        let k = self.linear(normed, weights.weight(Slot::Key)?, k)?;
        self.part(Part::Value);
        let v = self.linear(normed, weights.weight(Slot::Value)?, v)?;
        Ok([q, k, v])
    }

    /// What each head attended to [1, heads, T, head_dim] times its gate, which is made of `normed`.
    fn head_gate(&mut self, mixed: ValueId, normed: ValueId, weight: &Weight) -> Built {
        let (heads, tokens) = (self.config.num_attention_heads, self.options.tokens);
        self.part(Part::HeadGateProjection);
        let gate = self.linear(normed, weight, "attention.gate_rows")?;
        self.part(Part::HeadGate);
        let gate = self.sigmoid(gate, "attention.gate_sigmoid")?;
        let gate = if tokens == 1 {
            gate
        } else {
            self.transpose(gate, "attention.gate_by_head", &[1, 0])?
        };
        let gate = self.reshape(gate, "attention.gate", vec![1, heads, tokens, 1])?;
        self.add(Op::Mul, &[mixed, gate], "attention.gated")
    }

    /// Joins a cache with the step's entries: what the layer scores and what the step returns.
    fn window(
        &mut self,
        spec: &StepSpec,
        layer: &LayerSpec,
        cache: ValueId,
        entries: ValueId,
        names: &WindowNames<'_>,
    ) -> Result<(ValueId, ValueId), GraphError> {
        let joined = self.add(Op::Concat { axis: 2 }, &[cache, entries], names.joined)?;
        if layer.kind != LayerKind::Sliding || layer.layout != CacheLayout::Roll {
            return Ok((joined, entries));
        }
        let end = layer.cache_length + spec.tokens;
        let start = end - layer.cache_length;
        let rolled = Op::Slice { axis: 2, start, end };
        let rolled = self.graph.add(rolled, &[joined], names.output)?;
        let dropped = spec.dropped_entries(layer);
        let scored = if dropped == 0 {
            joined
        } else if dropped == start {
            rolled
        } else {
            let name = format!("{}.scored", names.joined);
            self.add(Op::Slice { axis: 2, start: dropped, end }, &[joined], &name)?
        };
        Ok((scored, rolled))
    }
}

/// Heads that are rotated, and what becomes of them.
struct Rotated<'a> {
    x: ValueId,
    /// Of the nodes, within the layer.
    name: &'a str,
    /// Of the result, as a whole.
    output: &'a str,
    /// What the result is there for.
    last: Part,
}

struct WindowNames<'a> {
    joined: &'a str,
    output: &'a str,
}

struct LayerPorts<'a> {
    /// Number of the layer within the slice.
    index: usize,
    layer: &'a LayerSpec,
    cos: ValueId,
    sin: ValueId,
    mask: ValueId,
    keys: ValueId,
    values: ValueId,
}
